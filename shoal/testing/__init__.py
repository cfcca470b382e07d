"""For tests, also of your own: the contract of algorithms, a Redis server with workers, and faults to inject."""

import sys

if "pytest" in sys.modules:  # so that a failed assertion of the contract shows its values
    sys.modules["pytest"].register_assert_rewrite("shoal.testing.algorithms")
