# Run by drgn with a dump loaded: reads physical addresses from one file and writes their pages to another.
import sys

with open(sys.argv[1]) as addresses, open(sys.argv[2], "wb") as pages:
    for address in addresses:
        pages.write(prog.read(int(address), 4096, physical=True))
