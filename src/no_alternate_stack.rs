//! Keeps std from giving each thread an alternate signal stack.
//!
//! Std installs handlers of SIGSEGV and SIGBUS before `main`, where they have none, only to word a
//! stack overflow. With them each thread that begins maps a stack for them, and panics where that
//! fails, before any code of its own: no caller of `spawn` can handle it, and one moment without
//! memory ends the daemon. Where the signals are not at their default when std looks, it installs
//! nothing and maps nothing, for good.
//!
//! So the signals are ignored from before std looks until `main`, and at their default after that.
//! A stack overflow still ends the process by SIGSEGV, though without a message: the guard page below
//! each stack stays. Must be in the binary: the tests of the library keep the behaviour of std.
#![allow(unsafe_code)] // sigaction before and in main; each block argues for itself

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The signals that std looks at.
const SIGNALS: [Signal; 2] = [Signal::SIGSEGV, Signal::SIGBUS];

// SAFETY: the C library calls what is in this section once, before it calls main, on the only
// thread there is and with arguments that a function without parameters need not look at; this one
// needs nothing of std.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_STD: extern "C" fn() = ignore;

extern "C" fn ignore() {
    set(SigHandler::SigIgn);
}

/// To be called first in `main`.
pub(crate) fn restore() {
    set(SigHandler::SigDfl);
}

fn set(handler: SigHandler) {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    for signal in SIGNALS {
        // SAFETY: no handler is installed that could run, and none is replaced but one of these
        // two. The signals exist, so it cannot fail.
        let _ = unsafe { sigaction(signal, &action) };
    }
}
