"""Language models of texts: corpus, tokens, samples."""
