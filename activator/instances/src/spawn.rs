//! The start of a process: clone with a shared address space and a stack of its own, as
//! `posix_spawn` does it, so that the cost does not grow with the activator.
//!
//! The child is in its cgroup before it execs: no descendant can be outside. It calls nothing but
//! system calls, and tells why it failed through the memory that it shares.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::unistd::Pid;

/// What to start, all of it prepared by the parent.
pub(crate) struct Prepared {
    pub(crate) program: CString,
    pub(crate) args: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) dir: CString,
    pub(crate) stdin: File,
    pub(crate) output: File,
    /// Becomes descriptor 3, as `LISTEN_FDS` says.
    pub(crate) listener: Option<OwnedFd>,
    /// The cgroup to start in.
    pub(crate) cgroup: Option<CgroupFds>,
    /// A Landlock ruleset that it and all its descendants keep.
    pub(crate) ruleset: Option<OwnedFd>,
    /// User and group that it runs as, with no other groups.
    pub(crate) user: Option<u32>,
}

/// A cgroup's directory, and its `cgroup.procs` open for writing.
#[derive(Debug)]
pub(crate) struct CgroupFds {
    pub(crate) dir: File,
    pub(crate) procs: File,
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) pid: Pid,
    pub(crate) pidfd: OwnedFd,
}

/// The child's stack: system calls alone need little, and a page more guards nothing.
const STACK_BYTES: usize = 64 * 1024;

struct Request {
    program: *const libc::c_char,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    dir: *const libc::c_char,
    fds: [RawFd; 3],
    listener: Option<RawFd>,
    cgroup: Option<RawFd>,
    ruleset: Option<RawFd>,
    user: Option<u32>,
    /// `LISTEN_PID=` with room for the digits that only the child knows.
    listen_pid: [u8; LISTEN_PID_BYTES],
    /// Which step failed, and its errno; step 0 is success.
    failed: (i32, i32),
}

const LISTEN_PID: &[u8] = b"LISTEN_PID=";
const LISTEN_PID_BYTES: usize = 11 + 10 + 1; // the name, the digits of 2^32, a zero

const STEPS: [&str; 9] = [
    "start",
    "join the cgroup",
    "make a session",
    "enter the directory",
    "set no_new_privs",
    "confine itself by Landlock",
    "become its own user",
    "pass descriptors",
    "exec",
];

/// Starts it; returns when it has execed, or says which step failed.
pub(crate) fn spawn(prepared: &Prepared) -> io::Result<Child> {
    let mut request = request(prepared);
    let mut stack = vec![0_u8; STACK_BYTES];
    let mut pidfd: RawFd = -1;
    let signals = BlockedSignals::new()?;
    let cgroup = prepared.cgroup.as_ref().map(|cgroup| cgroup.dir.as_raw_fd());
    let pid = clone_child(&mut request, &mut stack, &mut pidfd, cgroup)?;
    drop(signals);
    let pid = Pid::from_raw(pid);
    // SAFETY: CLONE_PIDFD stored a new descriptor that nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let (step, errno) = request.failed;
    if step == 0 {
        return Ok(Child { pid, pidfd });
    }
    // It has exited; nobody else may reap it.
    nix::sys::wait::waitpid(pid, None).map_err(io::Error::from)?;
    let name = usize::try_from(step).ok().and_then(|step| STEPS.get(step)).unwrap_or(&STEPS[0]);
    let error = io::Error::from_raw_os_error(errno);
    Err(io::Error::new(error.kind(), format!("cannot {name}: {error}")))
}

fn request(prepared: &Prepared) -> Request {
    let pointers = |texts: &[CString]| {
        texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
    };
    let mut listen_pid = [0_u8; LISTEN_PID_BYTES];
    for (to, from) in listen_pid.iter_mut().zip(LISTEN_PID) {
        *to = *from;
    }
    let mut envp = pointers(&prepared.env);
    if prepared.listener.is_some() {
        // Filled in by the child, which alone knows its pid.
        envp.insert(0, std::ptr::null());
    }
    Request {
        program: prepared.program.as_ptr(),
        argv: pointers(&prepared.args),
        envp,
        dir: prepared.dir.as_ptr(),
        fds: [prepared.stdin.as_raw_fd(), prepared.output.as_raw_fd(), prepared.output.as_raw_fd()],
        listener: prepared.listener.as_ref().map(AsRawFd::as_raw_fd),
        cgroup: prepared.cgroup.as_ref().map(|cgroup| cgroup.procs.as_raw_fd()),
        ruleset: prepared.ruleset.as_ref().map(AsRawFd::as_raw_fd),
        user: prepared.user,
        listen_pid,
        failed: (0, 0),
    }
}

/// Starts the child on a stack of its own, in its cgroup from its first instruction: moving a
/// running process into one waits for an RCU grace period, 10 ms and more.
#[cfg(target_arch = "x86_64")]
fn clone_child(
    request: &mut Request,
    stack: &mut [u8],
    pidfd: &mut RawFd,
    cgroup: Option<RawFd>,
) -> io::Result<libc::pid_t> {
    let number = |value: libc::c_int| u64::try_from(value).unwrap_or(0);
    let address = |pointer: usize| u64::try_from(pointer).unwrap_or(0);
    // SAFETY: all-zero is a valid value of this plain struct.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = number(libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD);
    args.pidfd = address(std::ptr::from_mut(pidfd).expose_provenance());
    args.exit_signal = number(libc::SIGCHLD);
    args.stack = address(stack.as_mut_ptr().expose_provenance());
    args.stack_size = address(stack.len() & !15);
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = number(cgroup);
        request.cgroup = None;
    }
    let argument: *mut Request = request;
    let result: i64;
    // SAFETY: the kernel reads `args`; the child runs `child` on the given stack and never returns
    // from it; CLONE_VFORK keeps this thread here until it has execed or exited, so `request` and
    // the stack outlive it. A system call spoils rcx and r11 alone.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {argument}",
            "call {child}",
            "ud2",
            "2:",
            argument = in(reg) argument,
            child = in(reg) child,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw mut args,
            in("rsi") size_of::<libc::clone_args>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    let code = |number: i64| i32::try_from(number).unwrap_or(0);
    if result < 0 { Err(io::Error::from_raw_os_error(code(-result))) } else { Ok(code(result)) }
}

/// From `linux/sched.h`: beyond what the 32-bit flags of `clone` can hold.
#[cfg(target_arch = "x86_64")]
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Where there is no assembly for `clone3` with a stack: the child joins its cgroup itself, first.
#[cfg(not(target_arch = "x86_64"))]
fn clone_child(
    request: &mut Request,
    stack: &mut [u8],
    pidfd: &mut RawFd,
    _cgroup: Option<RawFd>,
) -> io::Result<libc::pid_t> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let argument: *mut Request = request;
    let top = stack.as_mut_ptr().wrapping_add(stack.len() & !15);
    let pidfd: *mut RawFd = pidfd;
    // SAFETY: `child` gets a pointer to `request` and a stack of its own; both outlive it, since
    // CLONE_VFORK keeps this thread here until the child has execed or exited.
    let pid = unsafe { libc::clone(child, top.cast(), flags, argument.cast(), pidfd) };
    if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(pid) }
}

/// Keeps signals away from the child until it execs: our handlers must not run in it.
struct BlockedSignals(nix::sys::signal::SigSet);

impl BlockedSignals {
    fn new() -> io::Result<Self> {
        use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
        let mut before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
        Ok(Self(before))
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        use nix::sys::signal::{SigmaskHow, pthread_sigmask};
        // Cannot fail: the set was ours.
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&self.0), None).ok();
    }
}

extern "C" fn child(argument: *mut libc::c_void) -> libc::c_int {
    let request: *mut Request = argument.cast();
    // SAFETY: the parent waits (CLONE_VFORK) and touches it only after we are gone.
    let request = unsafe { &mut *request };
    let step = run(request);
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    request.failed = (step, errno);
    // SAFETY: leaves without running the parent's exit handlers.
    unsafe { libc::_exit(127) }
}

/// Returns the number of the step that failed; does not return when all went well.
fn run(request: &mut Request) -> i32 {
    if let Some(cgroup) = request.cgroup {
        let own = b"0";
        // SAFETY: `own` is one readable byte; "0" means the writer itself.
        if unsafe { libc::write(cgroup, own.as_ptr().cast(), 1) } != 1 {
            return 1;
        }
    }
    // SAFETY: takes no pointer.
    if unsafe { libc::setsid() } < 0 {
        return 2;
    }
    // SAFETY: `dir` ends in a zero and outlives us.
    if unsafe { libc::chdir(request.dir) } != 0 {
        return 3;
    }
    // SAFETY: takes no pointer.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return 4;
    }
    if let Some(ruleset) = request.ruleset {
        // SAFETY: takes two integers.
        if unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) } != 0 {
            return 5;
        }
    }
    if request.user.is_some_and(|user| !become_user(user)) {
        return 6;
    }
    if !pass_descriptors(request) {
        return 7;
    }
    reset_signals();
    if request.listener.is_some() {
        write_pid(&mut request.listen_pid);
        let pointer: *const libc::c_char = request.listen_pid.as_ptr().cast();
        if let Some(first) = request.envp.first_mut() {
            *first = pointer;
        }
    }
    // SAFETY: both lists end in a null, their texts in zeros, and all outlive the call.
    unsafe { libc::execve(request.program, request.argv.as_ptr(), request.envp.as_ptr()) };
    8
}

/// By the system calls themselves: the C library's functions would tell all threads of the parent, whose
/// memory this is.
fn become_user(user: u32) -> bool {
    let none: *const libc::gid_t = std::ptr::null();
    // SAFETY: an empty list is not read.
    if unsafe { libc::syscall(libc::SYS_setgroups, 0, none) } != 0 {
        return false;
    }
    // SAFETY: takes three integers.
    if unsafe { libc::syscall(libc::SYS_setresgid, user, user, user) } != 0 {
        return false;
    }
    // SAFETY: takes three integers.
    unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) == 0 }
}

fn pass_descriptors(request: &Request) -> bool {
    // The listener first goes where nothing below 4 can overwrite it.
    let listener = match request.listener {
        // SAFETY: takes no pointer.
        Some(fd) => unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 10) },
        None => -1,
    };
    for (target, fd) in (0_i32..).zip(request.fds) {
        // SAFETY: takes no pointer.
        if unsafe { libc::dup2(fd, target) } < 0 {
            return false;
        }
    }
    // SAFETY: takes no pointer.
    request.listener.is_none() || unsafe { libc::dup2(listener, 3) } == 3
}

/// Handlers back to their defaults, mask empty: a child inherits both.
fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL is a valid disposition; those that cannot be set just fail.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills the whole set.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: `none` was filled above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) };
}

/// Decimal, no leading zeros: some readers take those for octal.
fn write_pid(buffer: &mut [u8; LISTEN_PID_BYTES]) {
    // SAFETY: takes no pointer. The C library's cached pid would be the parent's.
    let pid = unsafe { libc::syscall(libc::SYS_getpid) };
    let mut rest = u32::try_from(pid).unwrap_or(0);
    let mut digits = [0_u8; 10];
    let mut count = 0;
    loop {
        digits[count] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        count += 1;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    for (index, digit) in digits.iter().take(count).rev().enumerate() {
        buffer[LISTEN_PID.len() + index] = *digit;
    }
    buffer[LISTEN_PID.len() + count] = 0;
}
