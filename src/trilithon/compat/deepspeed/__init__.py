"""The public names of DeepSpeed, mapped onto ours: a script written for it runs as it is.

    import trilithon.compat.deepspeed as deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config)

Adapters only. Names are resolved on first use; one that is not here raises an error that names the way in our own
library. Where releases of DeepSpeed differ, TRILITHON_DEEPSPEED_RELEASE=0.16 chooses the older behaviour.
"""

from __future__ import annotations

import sys

from trilithon.compat.deepspeed.git_version_info import git_branch, git_hash, version
from trilithon.compat.deepspeed.resolve import fill, install

__version__ = version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
__git_hash__, __git_branch__ = git_hash, git_branch
HAS_TRITON = False  # no kernel of DeepSpeed's is here; ours choose for themselves

install()
__getattr__ = fill(sys.modules[__name__])
