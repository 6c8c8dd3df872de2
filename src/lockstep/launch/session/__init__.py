"""Sessions: ranks that run a loop of the user's, and the script or function that holds it."""
