/* How fast the processor's time-stamp counter runs: prints a number of kHz. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <x86intrin.h>

enum { LOOKS = 64, PAUSE_NANOSECONDS = 200 * 1000 * 1000, NANOSECONDS = 1000 * 1000 * 1000 };

struct moment {
    uint64_t ticks;
    int64_t nanoseconds;
};

/* Returns 0, or -1 with errno. The look that took the least time counts: another one may have been
 * interrupted between its two clocks. */
static int look(struct moment *found)
{
    uint64_t least = UINT64_MAX;
    for (int each = 0; each < LOOKS; each++) {
        struct timespec time;
        uint64_t before = __rdtsc();
        if (clock_gettime(CLOCK_MONOTONIC_RAW, &time) != 0)
            return -1;
        uint64_t took = __rdtsc() - before;
        if (took < least) {
            least = took;
            found->ticks = before + took / 2;
            found->nanoseconds = (int64_t)time.tv_sec * NANOSECONDS + time.tv_nsec;
        }
    }
    return 0;
}

int main(void)
{
    struct timespec pause = {.tv_nsec = PAUSE_NANOSECONDS};
    struct moment first, last;
    int failed = look(&first);
    while (failed == 0 && nanosleep(&pause, &pause) != 0)
        failed = errno == EINTR ? 0 : -1;
    if (failed != 0 || look(&last) != 0) {
        fprintf(stderr, "clock_rate: %s\n", strerror(errno));
        return 1;
    }
    double milliseconds = (double)(last.nanoseconds - first.nanoseconds) / 1e6;
    return printf("%.0f\n", (double)(last.ticks - first.ticks) / milliseconds) < 0;
}
