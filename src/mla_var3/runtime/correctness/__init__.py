"""Whether a kernel is right: inputs that betray mistakes, oracles in higher precision, and the checks that compare."""
