/* Breaks the kernel it is loaded into, as a bad driver does: a write through a null pointer.
 *
 * With `kernel.panic_on_oops=1` that is a panic whose stack goes through hearth_fault_strike. */
#include <linux/module.h>

/* Apart from init, and not inlined: a name of its own on the stack that a debugger shows. */
static noinline void hearth_fault_strike(int *address)
{
	WRITE_ONCE(*address, 1);
}

static int __init hearth_fault_init(void)
{
	hearth_fault_strike(NULL);
	return 0;
}

module_init(hearth_fault_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Writes through a null pointer: a panic drill");
