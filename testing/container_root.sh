#!/usr/bin/env bash
# Runs a command as in our containers: user 10001 without capabilities, a read-only root, and /tmp, /cache and /run/foredraft
# to write to. Needs root and a mount namespace of its own: unshare --mount container_root.sh VISIBLE... -- COMMAND...
# VISIBLE are directories that the user may read, wherever they lie.
set -euo pipefail

visible=()
while [ "$1" != -- ]; do visible+=("$1"); shift; done
shift

mount --make-rprivate /
mkdir -p /run/foredraft /cache
mount -t tmpfs -o mode=755 tmpfs /mnt
index=0
for directory in "${visible[@]}"; do
    mkdir "/mnt/$index"
    mount --rbind "$directory" "/mnt/$index"
    index=$((index + 1))
done
# Home directories are closed to other users; what is needed of them is put into an open one.
for top in $(printf '%s\n' "${visible[@]}" | cut -d/ -f2 | sort -u); do
    if [ "$(stat -c %A "/$top" | cut -c10)" = - ]; then
        mount -t tmpfs -o mode=755 tmpfs "/$top"
    fi
done
index=0
for directory in "${visible[@]}"; do
    if [ ! -e "$directory" ]; then
        mkdir -p "$directory"
        mount --rbind "/mnt/$index" "$directory"
    fi
    index=$((index + 1))
done
for directory in /tmp /cache /run/foredraft; do
    mount -t tmpfs -o mode=0700,uid=10001,gid=10001 tmpfs "$directory"
done
mount -o remount,bind,ro /
cd /tmp
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
