"""The routes of one rank, straight from an assignment, as `PlannedRoutes` gives them."""

from isobatch.engine.dispatching.routes import PlannedRoutes, feature_moves


def step_routes(work, features, rank):
    """By round and encoder, the route of a rank."""
    moves = feature_moves(work, features)
    return PlannedRoutes(moves=moves, num_rounds=len(work.micro_batches[rank]), rank=rank).rounds
