"""The built-in tasks."""

#: Name and class of each. Reading the names imports no torch.
BUILT_IN = {
    "har": "lockstep.tasks.har:HarTask",
    "images": "lockstep.tasks.images.task:ImagesTask",
    "text": "lockstep.tasks.text.task:TextTask",
    "speech": "lockstep.tasks.speech.task:SpeechTask",
    "autoencoder": "lockstep.tasks.autoencoder:AutoencoderTask",
}
