"""Train a module of your own under any plan: ``import sailor``.

The code is in ``worker.script``; this module only gives its public names a home.
"""

from worker.script.script_trainer import Trainer

__all__ = ["Trainer"]
