//! Run by `make test-nested`: the emulated host, and what the tests inside say.

use hearth_vmtest::Result;

use crate::host::Host;

/// Tests in `inside`: one that is not found would not be missed.
const INSIDE: usize = 4;

#[test]
#[ignore = "make test-nested"]
fn hearth_does_under_kvm_what_it_does_under_emulation() -> Result<()> {
    let host = Host::boot("kvm")?;
    let said = host.run_tests("inside::")?;
    eprintln!("{}", said.text());
    assert_eq!(said.status, 0);
    assert!(said.text().contains(&format!("ok. {INSIDE} passed; 0 failed")), "not all of them were run");
    Ok(())
}
