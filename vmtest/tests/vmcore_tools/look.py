# Run by drgn with a dump loaded: prints as JSON what a person would look at first.
import json

from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.printk import get_printk_records

crashed = prog.crashed_thread()
tasks = [task.comm.string_().decode() for task in for_each_task(prog)]
# Unwinding is guesswork beyond the kernel's part of the stack.
stack = [frame.name or hex(frame.pc) for frame in crashed.stack_trace()][:64]
print(json.dumps({
    "release": prog["init_uts_ns"].name.release.string_().decode(),
    "crashed": crashed.object.comm.string_().decode(),
    "stack": stack,
    "tasks": tasks,
    "log": [record.text.decode(errors="replace") for record in get_printk_records(prog)],
}))
