# Run a command without files of the C library's folder, which match $2: in a mount namespace of its
# own, below an overlay in the folder $1. Needs root.
set -e
folder=$1 hidden=$2 libraries=$(dirname "$(ldconfig -p | awk '/libc\.so\.6 .*x86-64|libc\.so\.6 .*AArch64/ {print $NF; exit}')")
shift 2
mount -t tmpfs none "$folder"
mkdir "$folder/upper" "$folder/work"
mount -t overlay none -o "lowerdir=$libraries,upperdir=$folder/upper,workdir=$folder/work" \
    "$libraries"
find "$libraries" -maxdepth 1 -regextype posix-extended -regex ".*/($hidden)\.so.*" -delete
exec "$@"
