"""Many runs: sweeps, searches, comparisons, and their figures."""
