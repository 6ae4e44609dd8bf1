"""Who works on which samples of one step: what loaders ask, and planners answer."""
