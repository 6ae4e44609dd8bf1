"""Orders of groups: random in each epoch, shared evenly among ranks; regrouping."""
