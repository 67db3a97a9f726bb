//! Restores of real services: Debian with a web server and a database, in each mode, with the snapshot in the host's page cache
//! and without. Run by `make soak NAME=services`.

use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::{Drives, Result, TestVm};

use super::restores::{WAYS, comes_back};
use super::{count, fill, start_counter};

const KNOWN_MIB: u64 = 192;

/// Reads a file from the web server and checks each byte, asks the database for known sums, and writes to it.
const ASK: &str = "set -e
exec 3<>/dev/tcp/127.0.0.1/80
printf 'GET /files/007.bin HTTP/1.0\\r\\n\\r\\n' >&3
tail -c 1048576 <&3 >/tmp/007.bin
probe verify /tmp/007.bin 1
ask() { psql -qAt -h 127.0.0.1 -U postgres -c \"$1\"; }
[ \"$(ask 'select count(*), sum(balance) from accounts where id <= 200000')\" = '200000|99900000' ]
ask 'update accounts set balance = balance + 1 where id = 7; update accounts set balance = balance - 1 where id = 7'";

#[test]
#[ignore = "takes minutes, and an image of its own: make soak NAME=services"]
fn web_server_and_database_survive_each_restore_mode() -> Result<()> {
    let vm = TestVm::debian_with("services", Debian::Database).boot()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    vm.sh("mount -t tmpfs -o size=60% tmp /tmp")?;
    vm.sh("until pg_isready -q -h 127.0.0.1; do sleep 0.2; done")?;
    serves(&vm)?;
    fill(&vm, KNOWN_MIB)?;
    start_counter(&vm)?;
    count(&vm)?;
    vm.save_with(&snapshot, &["--scan"])?;
    vm.stop_at_once()?;
    for way in WAYS {
        for warm in [true, false] {
            let clone = comes_back(&vm, &snapshot, way, warm, &nonce)?;
            serves(&clone)?;
            eprintln!("{way:?}, warm {warm}: both are there, {:?}", clone.status()?.restore);
            clone.has_no_disk_errors()?;
            clone.stop_at_once()?;
        }
    }
    Ok(())
}

fn serves(vm: &TestVm) -> Result<()> {
    vm.sh(&format!("cat >/tmp/ask <<'ASK'\n{ASK}\nASK\nbash /tmp/ask")).map(drop)
}
