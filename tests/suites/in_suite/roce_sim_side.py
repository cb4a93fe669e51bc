"""roce-sim's own side, in the folder of its sources: roce_sim_side.py ADDRESS PORT.

Its packets lack IPv4's "don't fragment", which RoCE v2 has (InfiniBand's annex A17): software_roce
cannot see that bit, and takes it for set when it checks the invariant CRC. Here they have it.
"""

import runpy
import sys

from scapy.layers.inet import IP

DONT_FRAGMENT = 2

sys.path.insert(0, "")
next(each for each in IP.fields_desc if each.name == "flags").default = DONT_FRAGMENT
runpy.run_path("sanity_side.py", run_name="__main__")
