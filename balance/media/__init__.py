"""Media -> tokens: sizes of images, lengths of clips, and the headers that tell them."""
