# The caller puts dir, bin and as_owner in front of this text. `supervise` starts and ends the server
# by the lines of its stdin, `restart` may be run by anybody else meanwhile.

cd "$dir" || exit 1
unset PGDATA PGPORT
LC_ALL=C
export LC_ALL

run() { as_owner "$@" </dev/null >>"$dir/log" 2>&1; }

init() { run "$bin/initdb" --no-locale -E UTF8 --auth=trust -U postgres -N -D "$dir/data"; }

start() { run "$bin/pg_ctl" start -w -t 60 -D "$dir/data" -l "$dir/log"; }

restart() { run "$bin/pg_ctl" restart -w -t 60 -m "${1:-fast}" -D "$dir/data" -l "$dir/log"; }

# A server without a parent stays a zombie until process 1 looks after it, which takes long in some
# containers, so that kill -0 alone is no sign of life.
alive() {
	kill -0 "$1" 2>/dev/null || return 1
	case $(cat "/proc/$1/stat" 2>/dev/null) in
	*") Z "*) return 1 ;;
	esac
}

# The data directory is moved away first: a restart somebody began meanwhile finds nothing to start,
# and one that got further is ended by the next round.
end() {
	cd / || return 1
	mv "$dir/data" "$dir/closed" 2>/dev/null
	rounds=0
	while [ -e "$dir" ] && [ "$rounds" -lt 50 ]; do
		rounds=$((rounds + 1))
		pid=$(head -n 1 "$dir/closed/postmaster.pid" 2>/dev/null)
		if [ -n "$pid" ]; then
			run "$bin/pg_ctl" stop -w -t 20 -m immediate -D "$dir/closed" || kill -KILL "$pid" 2>/dev/null
			waits=0
			while alive "$pid" && [ "$waits" -lt 500 ]; do
				waits=$((waits + 1))
				sleep 0.01
			done
		fi
		rm -rf "$dir" 2>/dev/null
	done
	[ ! -e "$dir" ]
}

case $1 in
supervise)
	trap : HUP INT TERM PIPE
	while read -r command mode; do
		case $command in
		init) init ;;
		start) start ;;
		restart) restart "$mode" ;;
		*) false ;;
		esac
		echo $?
	done
	end
	;;
restart)
	restart "$2"
	;;
*)
	echo "usage: control supervise | restart [fast|immediate]" >&2
	exit 2
	;;
esac
