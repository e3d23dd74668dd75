#!/bin/bash
# PID 1 of a virtual node, in namespaces of its own: lays out the node's file system, says so, and waits until its standard
# input is closed. virtual.py holds the other end, so that its death, however it comes, ends this process; and the end of a
# PID 1 ends all processes of its node, which were the last to know its mounts and its network.
#
#     unshare --fork --mount --net --uts --ipc --pid boot.sh NAME FOLDER CPUS DEVICES UID TREE [HOME_OF_PYTHON]
set -euo pipefail
name=$1 folder=$2 cpus=$3 devices=$4 user=$5 tree=$6 python=${7:-}

# While /proc is the machine's, this is the PID by which the machine knows the node.
read -r pid _ </proc/self/stat
hostname "$name"
ip link set lo up

# ---- the root: TREE, which may be this machine's, with what is written kept in memory -------------------------------

mount -t tmpfs -o mode=755 node /run
mkdir /run/upper /run/work /run/root
# Copied, since overlayfs takes no two layers of which one lies in the other.
for layer in "$folder/layer" "$folder/all" "$folder/node/$name"; do
    [[ ! -d $layer ]] || cp -a "$layer/." /run/upper
done
# A mount of the machine's is no part of its root's file system, and is laid out in the same way, after it.
apart=()
if [[ $tree == / ]]; then
    mapfile -t apart < <(findmnt --raw --noheadings --output TARGET | grep -E '^/(usr|opt|var)(/[^/]+)?$' | sort -u)
fi
for ((i = ${#apart[@]} - 1; i >= 0; i--)); do # /usr/local before /usr
    mkdir -p "/run/apart/$i/upper" "/run/apart/$i/work" "/run/upper${apart[i]}"
    cp -a "/run/upper${apart[i]}/." "/run/apart/$i/upper"
    rm -r "/run/upper${apart[i]}"
    chmod --reference="${apart[i]}" "/run/apart/$i/upper"
done
root=/run/root
mount -t overlay -o "lowerdir=$tree,upperdir=/run/upper,workdir=/run/work" overlay $root
for i in "${!apart[@]}"; do
    own="upperdir=/run/apart/$i/upper,workdir=/run/apart/$i/work"
    mount -t overlay -o "lowerdir=${apart[i]},$own" overlay "$root${apart[i]}"
done

# ---- what belongs to the kernel, to this node, or to all of them ----------------------------------------------------

mount -t proc proc $root/proc
# Of this network namespace: UCX and MPICH look for their interfaces in /sys/class/net.
mount -t sysfs sysfs $root/sys
[[ ! -d /sys/fs/cgroup ]] || mount --rbind /sys/fs/cgroup $root/sys/fs/cgroup
# The PID files of daemons have fixed names, and PMIx and PBS leave fixed names in /tmp.
mount -t tmpfs -o mode=755 run $root/run
mount -t tmpfs -o mode=1777 tmp $root/tmp
mkdir -p $root/run/munge $root/run/lock $root/run/cluster $root/run/vcpu $root/home $root/var/spool/slurmd
mount --bind "$folder/munge" $root/run/munge
mount --bind "$folder/shared" $root/run/cluster
mount --bind "$folder/home" $root/home
# Two processes with one boot id are on one host, to UCX and NCCL: they would try shared memory.
cat /proc/sys/kernel/random/uuid >$root/run/boot_id
mount --bind $root/run/boot_id $root/proc/sys/kernel/random/boot_id
tr -d - <$root/run/boot_id >$root/etc/machine-id
# The machine's Python may live in root's home, which no other user may enter.
mount -t tmpfs -o mode=755 root $root/root
if [[ -n $python ]]; then
    mkdir -p "$root$python"
    mount --rbind "$python" "$root$python"
fi
while IFS=$'\t' read -r place source; do
    if [[ -z $source ]]; then
        mkdir -p "$root$place"
        mount -t tmpfs -o "mode=755,uid=$user,gid=$user" disk "$root$place"
    elif [[ -d $source ]]; then
        mkdir -p "$root$place"
        mount --rbind "$source" "$root$place"
    else
        mkdir -p "$root${place%/*}"
        : >>"$root$place"
        mount --bind "$source" "$root$place"
    fi
done <"$folder/paths"

# ---- /dev -----------------------------------------------------------------------------------------------------------

dev=$root/dev
mount -t tmpfs -o mode=755 dev $dev
mkdir $dev/pts $dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts $dev/pts
mount -t tmpfs -o mode=1777 shm $dev/shm
while read -r file major minor; do mknod -m 666 "$dev/$file" c "$major" "$minor"; done <<'END'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
fuse 10 229
END
# Devices without a driver: 240 is left to local use.
for ((device = 0; device < devices; device++)); do mknod -m 666 "$dev/gpu$device" c 240 "$device"; done
ln -s /proc/self/fd $dev/fd
ln -s fd/0 $dev/stdin
ln -s fd/1 $dev/stdout
ln -s fd/2 $dev/stderr
ln -s pts/ptmx $dev/ptmx

# ---- one thread a process, more CPUs than this machine has, and a slower disk ---------------------------------------

preloaded=(threads)

# A user binds a task that root has bound before: everybody may replace what lies there.
chmod 777 $root/run/vcpu
if ((cpus)); then
    for kind in online present possible; do
        echo "0-$((cpus - 1))" >$root/run/cpus
        mount --bind $root/run/cpus $root/sys/devices/system/cpu/$kind
    done
    echo "$cpus" >$root/run/vcpu/count
    preloaded+=(vcpu disk)
fi
for name in "${preloaded[@]}"; do
    cp "$folder/$name.so" $root/run
    echo "/run/$name.so"
done >$root/etc/ld.so.preload

# Not chroot, in which no user may make a namespace, and so no container.
cd $root
pivot_root . .
umount -l .
cd /

echo "$pid"
# bash takes care of orphans while it reads.
while read -r _; do :; done
