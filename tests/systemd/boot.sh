#!/bin/bash
# boot.sh - boot a real systemd (PID 1 of fresh namespaces) on a
# throw-away overlay of this machine's own /, run ONE command in it as a unit,
# print the command's output, return its exit code, leave nothing behind.
#
#   boot.sh [-u DIR]... [-b SRC:DST]... [-t SECS] [-v] -- COMMAND [ARG...]
#
#   -u DIR      copy DIR's unit files into the container's /etc/systemd/system
#   -b SRC:DST  bind SRC read-write at DST (default: nothing; all of / is there,
#               copy-on-write, so writes vanish with the container)
#               ($PWD is bound by itself where it lies under /tmp, /run or /dev,
#               which are fresh tmpfs inside)
#   -t SECS     give up after SECS (default 120), exit code 124
#   -v          show systemd's own log on stderr afterwards
#
# Exit code: the command's own; 255 if a signal killed it, 124 time-out, 125 misuse.
# Needs root, util-linux, coreutils, the package systemd (not systemd-container).
set -euo pipefail
self=$(readlink -f "$0")

if [[ ${RIS_STAGE:-} == pid1 ]]; then            # ---- inside, as PID 1 ----
  R=$RIS_ROOT
  ip link set lo up 2>/dev/null || true
  mount -t proc  -o nosuid,nodev,noexec proc "$R/proc"
  mount -t sysfs -o nosuid,nodev,noexec sysfs "$R/sys"
  mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$R/sys/fs/cgroup"   # pure v2 view
  mount -t bpf   -o nosuid,nodev,noexec,mode=700 bpf "$R/sys/fs/bpf"   # own bpffs
  cd "$R"; mkdir -p .old; pivot_root . .old; cd /
  umount -l /.old; rmdir /.old
  hostname ris
  exec env -i container=ris container_uuid= PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 SYSTEMD_LOG_TARGET=journal SYSTEMD_PROC_CMDLINE="systemd.unified_cgroup_hierarchy=1" \
    /lib/systemd/systemd --system --unit=ris.target --show-status=no
fi

if [[ ${RIS_STAGE:-} != outer ]]; then           # ---- first call: own mount ns ----
  [[ $EUID == 0 ]] || { echo "need root" >&2; exit 125; }
  RIS_STAGE=outer exec unshare --mount --propagation private -- "$self" "$@"
fi

units=() binds=() limit=120 verbose=
while getopts u:b:t:v o; do case $o in
  u) units+=("$OPTARG");; b) binds+=("$OPTARG");; t) limit=$OPTARG;; v) verbose=1;; *) exit 125;;
esac; done; shift $((OPTIND-1)); [[ $# -gt 0 ]] || { sed -n 2,19p "$self" >&2; exit 125; }

# the cgroup2 mount of the machine: hybrid (…/unified) or pure v2
if [[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]]; then C2=/sys/fs/cgroup
else C2=/sys/fs/cgroup/unified; fi
base=$C2$(sed -n 's/^0:://p' /proc/self/cgroup); base=${base%/}
# Where the machine hands controllers down, limits are to be enforced inside, too: a cgroup with processes
# of its own cannot pass them on, the topmost can.
! grep -qw memory "$C2/cgroup.subtree_control" || base=$C2
CG=$base/ris-$$
W=/tmp/ris.$$
sweep() { local d p   # what a SIGKILLed run left (empty directories), never a live run's
  for d in "$base"/ris-* /tmp/ris.*; do p=${d##*[.-]}
    [[ -d $d && $p =~ ^[0-9]+$ && ! -d /proc/$p ]] || continue
    if [[ $d == /tmp/* ]]; then rmdir "$d"; else find "$d" -depth -type d -exec rmdir {} +; fi 2>/dev/null || true
  done; }
sweep; mkdir -m 700 "$W"
tail_pid=
cleanup() {
  trap - EXIT INT TERM HUP
  [[ -n $tail_pid ]] && kill "$tail_pid" 2>/dev/null
  if [[ -d $CG ]]; then
    echo 1 >"$CG/cgroup.kill" 2>/dev/null || true
    for _ in {1..100}; do grep -q 'populated 0' "$CG/cgroup.events" && break; sleep .02; done
    find "$CG" -depth -type d -exec rmdir {} + 2>/dev/null || true
  fi
  umount -l "$W" 2>/dev/null || true; rmdir "$W" 2>/dev/null || true
}
trap cleanup EXIT; trap 'exit 130' INT TERM HUP

mount -t tmpfs -o size=2g,mode=755 ris "$W"
mkdir -p "$W"/{up,wk,r,io,unit}
mount -t overlay -o "lowerdir=/,upperdir=$W/up,workdir=$W/wk" ris "$W/r"
R=$W/r
for d in run tmp dev; do mount -t tmpfs -o mode=755 ris "$R/$d"; done; chmod 1777 "$R/tmp"
for d in proc sys; do mkdir -p "$R/$d"; done
mkdir -p "$R/dev/"{pts,shm,net}; chmod 1777 "$R/dev/shm"
mk() { mknod -m "$2" "$R/dev/$1" c "$3" "$4"; }
mk null 666 1 3; mk zero 666 1 5; mk full 666 1 7; mk random 666 1 8; mk urandom 666 1 9
mk tty 666 5 0; mk net/tun 666 10 200; mk kmsg 600 1 3        # kmsg = null: no noise in the real log
ln -s /proc/self/fd "$R/dev/fd"; for i in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${i%:*}" "$R/dev/${i#*:}"; done
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$R/dev/pts"; ln -s pts/ptmx "$R/dev/ptmx"
# a clean /etc/systemd/system: none of the machine's enabled services, only ours
mount --bind "$W/unit" "$R/etc/systemd/system"
: >"$W/fstab"; touch "$R/etc/fstab"; mount --bind "$W/fstab" "$R/etc/fstab"
rm -f "$R/etc/machine-id"; tr -d - </proc/sys/kernel/random/uuid >"$R/etc/machine-id"
for u in ${units[@]+"${units[@]}"}; do cp -a "$u"/. "$W/unit/"; done
for b in ${binds[@]+"${binds[@]}"}; do d=$R${b#*:}; [[ -e $d ]] || mkdir -p "$d"; mount --rbind "${b%%:*}" "$d"; done
[[ $PWD != /tmp/?* && $PWD != /run/?* && $PWD != /dev/?* ]] || { mkdir -p "$R$PWD"; mount --rbind "$PWD" "$R$PWD"; }
mkdir -p "$R/run/ris"; : >"$W/io/out"; mount --bind "$W/io" "$R/run/ris"
for m in systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udev-trigger.service \
  systemd-modules-load.service systemd-sysctl.service systemd-random-seed.service systemd-hwdb-update.service \
  systemd-binfmt.service proc-sys-fs-binfmt_misc.automount systemd-update-utmp.service systemd-timesyncd.service \
  systemd-journal-flush.service systemd-firstboot.service systemd-sysusers.service ldconfig.service \
  sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount \
  dev-hugepages.mount dev-mqueue.mount systemd-remount-fs.service e2scrub_reap.service
do [[ -e $W/unit/$m ]] || ln -s /dev/null "$W/unit/$m"; done
{ echo '#!/bin/bash'; printf 'cd %q 2>/dev/null || cd /; export HOME=%q PATH=%q\n' "$PWD" "${HOME:-/root}" "$PATH"
  printf 'exec'; printf ' %q' "$@"; echo; } >"$W/io/cmd"; chmod +x "$W/io/cmd"
cat >"$W/unit/ris.target" <<'U'
[Unit]
Requires=basic.target dbus.socket
After=basic.target dbus.socket
Wants=ris-cmd.service
U
cat >"$W/unit/ris-cmd.service" <<'U'
[Unit]
After=basic.target dbus.socket
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=exec
ExecStart=/run/ris/cmd
StandardOutput=append:/run/ris/out
StandardError=append:/run/ris/out
TimeoutStopSec=5
LimitMEMLOCK=infinity
U
mkdir "$CG"
tail -n +1 -s 0.05 --pid=$$ -f "$W/io/out" & tail_pid=$!
rc=0
die="setpriv --pdeathsig KILL"        # a SIGKILL on this script takes the container with it
RIS_STAGE=pid1 RIS_ROOT=$R $die timeout --foreground -s KILL "$limit" $die \
  bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' _ "$CG" \
  unshare --mount --propagation private --pid --uts --ipc --cgroup --net --fork --kill-child -- "$self" \
  </dev/null >"$W/io/console" 2>&1 &
{ wait $! || rc=$?; } 2>/dev/null
[[ $rc != 137 ]] || rc=124
sleep .12; kill "$tail_pid" 2>/dev/null || true; wait "$tail_pid" 2>/dev/null || true; tail_pid=
if [[ -n $verbose ]]; then cat "$W/io/console" >&2; journalctl -D "$R/run/log/journal" --no-pager -o short-monotonic >&2 2>/dev/null || true; fi
exit "$rc"
