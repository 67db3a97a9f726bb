# Thin: every line calls `cargo xtask`, where the work and its reasons are.
# `make` alone lists the targets.

.DEFAULT_GOAL := help
.PHONY: help setup build deb test test-vmcore test-nested soak lint docs demo bench clean toolchain

XTASK := cargo xtask

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: toolchain ## install what is missing, make the guest images
	@$(XTASK) setup

build: toolchain ## target/release/hearth, and target/guest/refill/hearth-refill.deb for guests
	@$(XTASK) build

deb: toolchain ## Debian packages: for hosts, and for guests (CHECK=1 tries them on clean Debians)
	@$(XTASK) deb $(if $(CHECK),--check)

test: toolchain ## unit tests and VM tests (QEMU=10 runs the guests on QEMU 10)
	@$(XTASK) test

test-vmcore: toolchain ## crash dumps in crash, drgn and makedumpfile (fetches 600 MiB once)
	@$(XTASK) test-vmcore

test-nested: toolchain ## Hearth under KVM, on a host that is itself emulated
	@$(XTASK) test-nested

soak: toolchain ## tests that take minutes, in a row, or make soak NAME=restores
	@$(XTASK) soak $(NAME)

lint: toolchain ## formatting, clippy, licences and sources of dependencies
	@$(XTASK) lint

docs: toolchain ## check the generated pages (UPDATE=1 rewrites them)
	@$(XTASK) docs

demo: toolchain ## a Debian machine crashes and comes back warm, with a report
	@$(XTASK) demo

bench: toolchain ## one comparison: make bench NAME=warm-reboot [QUICK=1]
	@$(XTASK) bench $(if $(NAME),$(NAME),--list) $(if $(QUICK),--quick)

clean: ## remove everything that was built or downloaded
	@rm -rf target

# What must be there before xtask itself can be compiled.
toolchain:
	@command -v cargo >/dev/null || { echo "Rust is missing. Install it: curl --proto '=https' -sSf https://sh.rustup.rs | sh -s -- -y"; exit 1; }
	@command -v cc >/dev/null || { echo "A C compiler is missing. Install it: apt-get install -y gcc libc6-dev"; exit 1; }
