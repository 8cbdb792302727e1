/*
 * One node that claims, sends heartbeats, drains and leaves, beside the recovery of locks that no node will settle.
 *
 * The model follows Diagnose (pkg/recovery), recoverHoldSQL, beatSQL, removeNodeSQL and the claims of a node. The answer to a claim
 * can be late or lost; a lost one is asked for later (reclaimSQL), which is a late answer. A heartbeat is one statement after
 * another: its list is made before it is sent, and it can arrive late. Recovery reads the locks, then the nodes, then frees under a
 * second check. Time passes between any two steps.
 *
 * Claims are checked:
 *   no early recovery   the lock of a run that has not ended is freed only if its node was silent for longer than its lease
 *   no gone node        a node that runs an entry has a row
 *
 * Variants, each of which has to violate one of the claims:
 *   ONE_LIST      a lock is freed after the first heartbeat that leaves it out
 *   NO_DEADLINE   the node runs an entry however late the answer to its claim was
 *   NODES_FIRST   recovery reads the nodes before the locks
 *   NO_RECHECK    recovery frees without the second check
 *   LEAVE_EARLY   a drained node removes its row while it runs an entry
 */

#define LEASE 3          /* steps of the clock */
#define DEADLINE 2       /* for the answer to a claim; less than the lease */
#ifndef LAST
#define LAST 5
#endif
#ifndef BEATS
#define BEATS 2
#endif
#ifndef PASSES
#define PASSES 2
#endif
#ifndef CLAIMS
#define CLAIMS 1
#endif

byte now = 0;

/* The row of the node. */
bool registered = 0;
byte beats = 0;
byte beat_at = 0;
byte beat_list = 0;      /* the token that the last heartbeat listed; 0 for none */

/* The lock record. */
byte token = 0;
byte claimed_at = 0;
byte token_seq = 0;

/* The node's own state. */
bool draining = 0;
bool gone = 0;           /* the process has ended */
byte held = 0;           /* the token that the node knows to hold */
byte running = 0;        /* the token under which an entry runs */

inline release(which) {
	if
	:: token == which -> token = 0
	:: else
	fi
}

proctype scheduler() {
	byte claims, sent_at, mine;

	atomic { registered = 1; beat_at = now; beats = 1; beat_list = 0 };
end:
	do
	:: claims < CLAIMS && !draining && token == 0 ->
		d_step { claims++; sent_at = now };
		if                                                 /* the server commits the claim, or the claim is lost */
		:: atomic { token == 0 -> token_seq++; token = token_seq; mine = token; claimed_at = now }
		:: mine = 0
		fi;
		if                                                 /* the answer */
		:: mine == 0 -> skip
		:: mine != 0 && gone -> skip
		:: mine != 0 && !gone ->
			atomic {
				held = mine;
				if
#ifndef NO_DEADLINE
				:: now - sent_at >= DEADLINE -> release(held); held = 0
#endif
				:: now - sent_at < DEADLINE && draining -> release(held); held = 0
#ifdef NO_DEADLINE
				:: !draining -> running = held
				:: draining -> release(held); held = 0
#else
				:: now - sent_at < DEADLINE && !draining -> running = held
#endif
				fi
			};
			if
			:: running != 0 ->
				atomic { release(running); running = 0; held = 0 }      /* finish; the token decides */
			:: else
			fi
		fi
	:: draining -> break
	:: claims == CLAIMS -> break
	od;
	/* Leave: removeNodeSQL, unless the row is evidence for a lock. */
	atomic {
		if
		:: draining && registered && (token == 0 || gone) -> registered = 0; gone = 1
		:: else -> gone = 1
		fi
	}
}

proctype heartbeat() {
	byte list;
	byte sent;

end:
	registered;
	do
	:: sent < BEATS && !gone ->
		d_step { list = held; sent++ };
		atomic {
			if
			:: registered -> beats++; beat_at = now; beat_list = list
			:: else
			fi
		}
	:: sent == BEATS || gone -> break
	od
}

/* An operator or a signal drains the node. */
proctype drain() {
	draining = 1
#ifdef LEAVE_EARLY
	;
	registered = 0
#endif
}

#define SILENT (now - beat_at)

/* judge is Diagnose. */
inline judge() {
	if :: first_token != seen_token -> first_token = 0; first = 0 :: else fi;
	if
	:: seen_token == 0 -> skip
	:: seen_token != 0 && !known -> dead = 1
	:: seen_token != 0 && known && silent > LEASE -> dead = 1
	:: seen_token != 0 && known && silent <= LEASE && (listed || age <= silent) -> first_token = 0
	:: else ->
#ifdef ONE_LIST
		unlisted = 1
#else
		if
		:: first_token == 0 && age - silent >= DEADLINE -> first_token = seen_token; first = seen_beats
		:: first_token != 0 && seen_beats > first && age > LEASE -> unlisted = 1
		:: else
		fi
#endif
	fi;
	if :: !dead && !unlisted -> seen_token = 0 :: else fi;
	age = 0; silent = 0; seen_beats = 0; known = 0; listed = 0
}

proctype recovery() {
	byte passes, seen_token, age, silent, first;
	byte first_token, seen_beats, listed;
	bool known, dead, unlisted;

	do
	:: passes < PASSES ->
		d_step { passes++; dead = 0; unlisted = 0 };
#ifdef NODES_FIRST
		d_step { known = registered; silent = SILENT; listed = beat_list; seen_beats = beats };
		d_step { seen_token = token; age = now - claimed_at; listed = (seen_token != 0 && listed == seen_token); judge() };
#else
		d_step { seen_token = token; age = now - claimed_at };
		d_step { known = registered; silent = SILENT; listed = (beat_list == seen_token); seen_beats = beats; judge() };
#endif
		/* recoverHoldSQL and the rest of the transaction. */
		atomic {
			if
			:: (dead || unlisted) && token == seen_token ->
				if
#ifndef NO_RECHECK
				:: dead && registered && SILENT <= LEASE -> skip
				:: unlisted && registered && beat_list == seen_token -> skip
#endif
				:: else ->
					assert(running != token || (registered && SILENT > LEASE));    /* no early recovery, no gone node */
					token = 0
				fi
			:: else
			fi;
			seen_token = 0
		}
	:: break
	od
}

proctype database_clock() {
	do
	:: now < LAST -> now++
	:: break
	od
}

init {
	atomic {
		run scheduler();
		run heartbeat();
		run drain();
		run recovery();
		run database_clock()
	}
}
