# A component that creates a file when it runs, and then sleeps for longer than any benchmark takes.
# A leftover component ends by itself after that time.
: >"$1"
exec sleep 1800
