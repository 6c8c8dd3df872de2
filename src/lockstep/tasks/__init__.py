"""The built-in tasks."""

#: Name and class of each. Reading the names imports no torch.
BUILT_IN = {
    "har": "lockstep.tasks.har:HarTask",
    "images": "lockstep.recipes.images.task:ImagesTask",
    "text": "lockstep.recipes.text.task:TextTask",
    "speech": "lockstep.recipes.speech.task:SpeechTask",
    "autoencoder": "lockstep.recipes.autoencoder:AutoencoderTask",
}
