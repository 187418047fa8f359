"""The absorbed form: attention in latent space."""
