"""``python -m tests.mutations``: break one rule at a time and see which tests fail."""

import sys

from tests.mutations.mutations import main

if __name__ == "__main__":
    sys.exit(main())
