//! What an instance can reach of the file system (Landlock, Linux 5.13+): its own directories, what it
//! was told to reach, and what every program needs.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    path_beneath_rules,
};

/// Paths that an instance can reach, with everything below them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confine {
    /// To read and to execute.
    pub read: Vec<PathBuf>,
    /// To read and to write, too.
    pub write: Vec<PathBuf>,
}

/// Programs, libraries, their settings, and what the kernel tells.
const READ: [&str; 11] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/proc", "/sys", "/run"];
/// Devices have owners and modes of their own.
const WRITE: [&str; 1] = ["/dev"];

/// Rights that kernels know by 6.10; what an older one does not know it does not restrict.
const RIGHTS: ABI = ABI::V5;

fn ruleset() -> Result<landlock::RulesetCreated, landlock::RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()
}

/// Whether this kernel restricts anything.
#[must_use]
pub fn landlock_works() -> bool {
    ruleset().is_ok_and(|created| Option::<OwnedFd>::from(created).is_some())
}

impl Confine {
    /// None where the kernel has no Landlock. A path that does not exist is passed over.
    pub(crate) fn ruleset(&self) -> io::Result<Option<OwnedFd>> {
        let fixed = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let read = [fixed(&READ), self.read.clone()].concat();
        let write = [fixed(&WRITE), self.write.clone()].concat();
        let created = ruleset()
            .and_then(|it| it.add_rules(path_beneath_rules(read, AccessFs::from_read(RIGHTS))))
            .and_then(|it| it.add_rules(path_beneath_rules(write, AccessFs::from_all(RIGHTS))))
            .map_err(io::Error::other)?;
        Ok(created.into())
    }
}
