#!/bin/bash
# Back up and restore the database of the Prefect server. PREFECT_SERVER_DATABASE_CONNECTION_URL names
# the database, which is PostgreSQL or SQLite. Source /etc/muster/secrets.env first.
#
#   backup.sh save DIRECTORY [KEEP]   write a new file into DIRECTORY while the server may run, and
#                                     keep the newest KEEP files (default 14)
#   backup.sh restore FILE            restore FILE into the database of the URL, which must not be in use
#
# URL of the SQLite database of `muster up`: PREFECT_SERVER_DATABASE_CONNECTION_URL=sqlite+aiosqlite:////PATH/prefect.db
set -euo pipefail
# Only this user may read a backup, because a backup contains the whole database.
umask 077

url="${PREFECT_SERVER_DATABASE_CONNECTION_URL:?is not set: source secrets.env}"
# URL of the database for pg_dump and pg_restore, which accept no driver name in it.
libpq="${url/+asyncpg/}"
libpq="${libpq/ssl=/sslmode=}"
sqlite="${url#sqlite+aiosqlite:///}"
python="$(dirname "$0")/../../.venv/bin/python"

save() {
	local directory="$1" keep="${2:-14}" file
	mkdir -p "$directory"
	file="$directory/prefect-$(date -u +%Y%m%dT%H%M%SZ)"
	draft="$directory/.draft.$$"
	trap 'rm -f "$draft"' EXIT
	case "$url" in
	postgresql*)
		file="$file.dump"
		pg_dump --format=custom --file="$draft" "$libpq"
		;;
	*)
		file="$file.db"
		"$python" -c 'import sqlite3, sys; s, t = map(sqlite3.connect, sys.argv[1:]); s.backup(t)' "$sqlite" "$draft"
		;;
	esac
	mv "$draft" "$file"
	# Delete all backups except the newest KEEP backups.
	find "$directory" -maxdepth 1 -type f -name 'prefect-*' -printf '%T@ %p\n' | sort -rn |
		tail -n "+$((keep + 1))" | cut -d ' ' -f 2- | xargs -r -d '\n' rm --
	echo "$file"
}

restore() {
	local file="$1"
	[ -s "$file" ] || { echo "$file: no such backup" >&2; exit 1; }
	case "$url" in
	postgresql*)
		# Replace the content of the database in one transaction.
		pg_restore --clean --if-exists --no-owner --single-transaction --dbname="$libpq" "$file"
		;;
	*)
		# These files belong to the old database. SQLite would apply them to the restored database.
		rm -f "$sqlite-wal" "$sqlite-shm"
		cp "$file" "$sqlite.draft.$$"
		mv "$sqlite.draft.$$" "$sqlite"
		;;
	esac
	echo "restored $file; run \`prefect server database upgrade -y\` where it is of an earlier release"
}

case "${1:-}" in
save) save "${2:?a directory}" "${3:-14}" ;;
restore) restore "${2:?a file}" ;;
*)
	sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
	exit 2
	;;
esac
