# A component that says that it runs, and then sleeps for longer than any benchmark takes; one that is
# forgotten ends by itself.
: >"$1"
exec sleep 1800
