"""Ready-made tasks beside HAR: speech, text, images, autoencoder, with their models."""
