"""Is this machine, or are these nodes, fit for training on several devices? Every finding comes with its fix."""
