"""Places in stores that cannot be used, and what is said of them."""

REFUSED = "refuses the credentials ({}): check {} and "
MISTAKES = {
    "wrong credentials": (
        lambda store: store.with_wrong_key(),
        "packed",
        {
            "s3": REFUSED.format("SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID"),
            "gs": "refuses the credentials (AuthenticationRequired): check GOOGLE_APPLICATION_CRED",
            "az": REFUSED.format("AuthorizationFailure", "AZURE_STORAGE_ACCOUNT_NAME"),
        },
    ),
    "missing bucket": (
        lambda store: store.environment,
        "no-such-bucket",
        {
            "s3": "no such bucket: create it, or correct the name",
            "gs": "no such bucket: create it, or correct the name",
            "az": "no such container: create it, or correct the name",
        },
    ),
    "unreachable": (
        lambda store: store.variables("http://127.0.0.1:9"),
        "packed",
        {
            scheme: f"cannot be reached (Connection refused): check the network and {variable}"
            for scheme, variable in {
                "s3": "AWS_ENDPOINT_URL",
                "gs": "GOOGLE_BASE_URL",
                "az": "AZURE_STORAGE_ENDPOINT",
            }.items()
        },
    ),
}
"""What is wrong: variables of a server, bucket, and what is said for each scheme."""
