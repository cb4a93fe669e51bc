/* Stands for a Python process that the server (server.py) forks: client NAME ARGUMENTS...
 *
 * It sends the server its arguments, environment, folder and first three descriptors, passes the
 * signals that it gets on to the process, and ends as the process ends. If it is killed, the server
 * kills the process.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { STREAMS = 3, FAILED = 125 };

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "fork client: %s: %s\n", what, strerror(errno));
    exit(FAILED);
}

/* Connect to the abstract name that the server listens on. */
static int connected(const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (server < 0)
        fail("socket");
    if (length + 1 > sizeof(address.sun_path)) {
        errno = ENAMETOOLONG;
        fail(name);
    }
    memcpy(address.sun_path + 1, name, length);
    length += offsetof(struct sockaddr_un, sun_path) + 1;
    if (connect(server, (struct sockaddr *)&address, (socklen_t)length))
        fail(name);
    return server;
}

static void send_all(int server, const void *bytes, size_t size)
{
    for (const char *next = bytes; size;) {
        ssize_t sent = send(server, next, size, MSG_NOSIGNAL);

        if (sent < 0)
            fail("send");
        next += sent;
        size -= (size_t)sent;
    }
}

/* The size in bytes, then the words, each with a null byte behind it. */
static void send_words(int server, char **words)
{
    uint32_t size = 0;

    for (char **word = words; *word; word++)
        size += (uint32_t)strlen(*word) + 1;
    send_all(server, &size, sizeof(size));
    for (; *words; words++)
        send_all(server, *words, strlen(*words) + 1);
}

/* One byte, with the descriptors beside it. */
static void send_streams(int server)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(STREAMS * sizeof(int))];
    } beside = {0};
    struct iovec part = {.iov_base = "", .iov_len = 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = beside.space,
                             .msg_controllen = sizeof(beside.space)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    const int streams[STREAMS] = {0, 1, 2};

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(streams));
    memcpy(CMSG_DATA(header), streams, sizeof(streams));
    if (sendmsg(server, &message, MSG_NOSIGNAL) != 1)
        fail("sendmsg");
}

/* The server sends two numbers: the process's identifier, then the status that waitpid gave. */
static int number_from(int server)
{
    int32_t number;
    ssize_t got = recv(server, &number, sizeof(number), MSG_WAITALL);

    if (got >= 0 && got < (ssize_t)sizeof(number))
        errno = ECONNRESET;
    if (got != sizeof(number))
        fail("recv");
    return number;
}

static int signals_to_pass_on(sigset_t *signals)
{
    int taken;

    if (sigfillset(signals) || sigprocmask(SIG_BLOCK, signals, NULL))
        fail("sigprocmask");
    taken = signalfd(-1, signals, SFD_CLOEXEC);
    if (taken < 0)
        fail("signalfd");
    return taken;
}

static void pass_on(int taken, pid_t process)
{
    struct signalfd_siginfo information;

    if (read(taken, &information, sizeof(information)) != sizeof(information))
        fail("signalfd");
    if (kill(process, (int)information.ssi_signo) && errno != ESRCH)
        fail("kill");
}

int main(int count, char **words)
{
    char folder[4096];
    char *place[] = {folder, NULL};
    sigset_t signals;
    struct pollfd ready[2];
    pid_t process;
    int status;

    if (count < 2) {
        fprintf(stderr, "usage: client NAME ARGUMENTS...\n");
        return FAILED;
    }
    if (!getcwd(folder, sizeof(folder)))
        fail("getcwd");
    ready[1] = (struct pollfd){.fd = signals_to_pass_on(&signals), .events = POLLIN};
    ready[0] = (struct pollfd){.fd = connected(words[1]), .events = POLLIN};
    send_streams(ready[0].fd);
    send_words(ready[0].fd, words + 2);
    send_words(ready[0].fd, environ);
    send_words(ready[0].fd, place);
    process = number_from(ready[0].fd);
    /* The descriptors are the process's now: a pipe ends when it closes them. */
    for (int stream = 0; stream < STREAMS; stream++)
        if (close(stream) && errno != EBADF)
            return FAILED;
    for (;;) {
        if (poll(ready, 2, -1) < 0)
            return FAILED;
        if (ready[0].revents)
            break;
        pass_on(ready[1].fd, process);
    }
    status = number_from(ready[0].fd);
    if (WIFEXITED(status))
        return WEXITSTATUS(status);
    if (signal(WTERMSIG(status), SIG_DFL) == SIG_ERR && WTERMSIG(status) != SIGKILL)
        return FAILED;
    if (raise(WTERMSIG(status)) || sigprocmask(SIG_UNBLOCK, &signals, NULL))
        return FAILED;
    return FAILED; /* not reached */
}
