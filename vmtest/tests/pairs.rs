//! Pairs of operations: each operation starts while each other one is under way, and something dies at each step of the
//! pair. After any failure nothing may be left behind, and the machine's next start must work.
//!
//! `every`: all pairs, on a stand-in for QEMU (src/bin/fake-qemu.rs). `hostile`: that stand-in, taken over by its guest.
//! `answers`: a keeper that answers while it waits for QEMU. `launches`: a QEMU that takes long to start. `hand_over`: what meets
//! the moment in which one keeper follows another. `ports`: ports that two machines cannot share. `real`: a sample on real guests.
//! `machine`: how the stand-in is held and watched.

#[path = "pairs/answers.rs"]
mod answers;
#[path = "pairs/every.rs"]
mod every;
#[path = "pairs/hand_over.rs"]
mod hand_over;
#[path = "pairs/hostile.rs"]
mod hostile;
#[path = "pairs/launches.rs"]
mod launches;
#[path = "pairs/machine.rs"]
mod machine;
#[path = "pairs/ports.rs"]
mod ports;
#[path = "pairs/real.rs"]
mod real;
