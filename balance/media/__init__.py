"""Media -> tokens: sizes of images, lengths of clips, headers that tell them."""
