/* Part of the preload library: see helper.c. */
#pragma once

/* Starts the helper. Returns the number of the keeper's end of its channel, or -1 if QEMU has no helper. */
int hearth_start_helper(void);
