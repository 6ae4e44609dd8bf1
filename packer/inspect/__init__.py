"""One group of a build as a person wants to see it: text, labels and images."""
