"""Nothing but a place: pytest puts it in `sys.path`, where the tests of the folders below find the
modules here.
"""
