"""From images to what a vision-language model's forward takes."""
