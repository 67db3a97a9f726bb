//! The guest's state on its way: taken from the old QEMU until it hangs up, given to the new one; with a time limit.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// State is some 300 KiB, and 17 MiB with a graphics card. More than this is not a state without RAM.
const STATE_BYTES_MAX: usize = 1 << 30;
const PIECE_BYTES: usize = 256 << 10;

/// Everything until the other side hangs up. `TimedOut` at the deadline.
pub fn receive(mut source: UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut state = Vec::with_capacity(2 * PIECE_BYTES);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        source.set_read_timeout(Some(left(deadline)?))?;
        match source.read(&mut piece) {
            Ok(0) => return Ok(state),
            Ok(length) => state.extend_from_slice(&piece[..length]),
            Err(error) => passing(error)?,
        }
        if state.len() > STATE_BYTES_MAX {
            return Err(io::Error::new(ErrorKind::InvalidData, "this is more than devices can have"));
        }
    }
}

/// All of it, and the end of it.
pub fn send(mut target: UnixStream, mut state: &[u8], deadline: Instant) -> io::Result<()> {
    while !state.is_empty() {
        target.set_write_timeout(Some(left(deadline)?))?;
        match target.write(state) {
            Ok(length) => state = &state[length..],
            Err(error) => passing(error)?,
        }
    }
    Ok(())
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The deadline itself is looked at in the next round.
fn passing(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn all_of_it_arrives_and_its_end() {
        let state: Vec<u8> = (0..3_000_000u32).map(|byte| byte as u8).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sent = state.clone();
        let sender = std::thread::spawn(move || send(ours, &sent, Instant::now() + LONG));
        assert!(receive(theirs, Instant::now() + LONG).unwrap() == state);
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_side_that_hangs_or_is_gone_is_told_apart() {
        let soon = || Instant::now() + Duration::from_millis(10);
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(receive(ours.try_clone().unwrap(), soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(send(ours.try_clone().unwrap(), &vec![0; 8 << 20], soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(theirs);
        assert_eq!(send(ours, &[0], soon()).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
