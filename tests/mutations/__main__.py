"""``python -m tests.mutations``: break one rule at a time and see which test turns red."""

import sys

from tests.mutations.mutations import main

if __name__ == "__main__":
    sys.exit(main())
