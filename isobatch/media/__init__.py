"""Files of images, videos and sounds: what counting and decoding share."""
