"""Speech recognition: recordings, features, decoding and scores. Importing the package loads no torch."""
