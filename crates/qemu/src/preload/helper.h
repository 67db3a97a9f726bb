/* Part of the preload library: see helper.c. */
#pragma once

/* Starts the helper. The number of the keeper's end of its channel, or -1: then QEMU has no helper. */
int hearth_start_helper(void);
