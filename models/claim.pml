/*
 * One lock key: push, claim, sweep, finish and recover, each a transaction under READ COMMITTED.
 *
 * The model follows the statements of push_many, lockFirstTemplate, claimGroupsSQL, sweepSQL, holdSQL, doneSQL, unlockSQL and
 * recoverHoldSQL. A finish waits for the lock record. A node waits for a moment, then skips it (busySQL) and tries again later,
 * which reaches no other states. A statement is one step that takes its snapshot and one or more steps that lock and change rows,
 * because other transactions may commit between the two. Changes are visible to others at the commit, which is one step.
 *
 * Claims are checked:
 *   no entry is stranded   when all transactions have ended, a pending entry has a ready row of its key
 *   fence                  an entry ends only under the newest token that was granted for its key
 *   one outcome            an entry ends once
 *
 * Variants, each of which has to violate one of the claims:
 *   ONE_LOOK       the finish looks for further entries in the snapshot of its first statement
 *   SWEEP_UNHELD   the sweep deletes a ready row of a locked key without a lock on the lock record
 *   PUSH_UNHELD    the push relies on a ready row that it has not locked
 *   NO_FENCE       the finish does not compare the token
 *   SKIPPED_LOST   a finish that skips the lock record, since another transaction has locked it, takes the lock for lost
 *   NO_KEY_LOCK    the claim inserts its lock record without the advisory lock of the key and replaces a record that it did not see
 */

#ifndef CLAIMS
#define CLAIMS 1         /* claims that a node attempts */
#endif
#ifndef PUSHERS
#define PUSHERS 1
#endif
#ifndef SWEEPS
#define SWEEPS 1
#endif
#ifndef RECOVERIES
#define RECOVERIES 1
#endif

#define ENTRIES 3        /* entry 0 was pushed before; entries 1 and 2 have a pusher each, if PUSHERS is 2 */
#define TUPLES  8        /* versions of ready rows; a deleted one is not used again, as a ctid within a transaction */
#define BIT(i)  (1 << (i))

/* Committed state, one bit for each entry or tuple. */
byte pending  = 1;       /* entries that wait or run */
byte ended    = 0;
byte live     = 1;       /* ready rows */
byte position[TUPLES];   /* of a ready row: the id of an entry */
byte tuples   = 1;       /* tuples used so far */

/* Row locks. Ready rows are only locked with SKIP LOCKED, so that the owner does not matter. */
byte row_locked = 0;
byte inserting  = 0;     /* ready rows of transactions in progress; they count for the unique index */

/* The lock record of the key. */
byte token = 0;          /* 0: there is none */
byte lock_last, lock_count, lock_position;
bool lock_updating = 0;  /* FOR UPDATE, or deleted by a transaction in progress */
byte lock_shared   = 0;  /* holders of FOR KEY SHARE */
bool key_locked    = 0;  /* the advisory lock of the key */
byte token_seq = 0;
byte granted   = 0;      /* the newest token whose claim was committed */

inline first_entries(set, last, n, out) {
	/* the n oldest entries of a set with ids up to last */
	out = 0; i = 0; k = 0;
	do
	:: i < ENTRIES && i <= last && k < n ->
		if
		:: set & BIT(i) -> out = out | BIT(i); k++
		:: else
		fi;
		i++
	:: else -> break
	od
}

inline lowest(set, out) {
	out = 0;
	do
	:: !(set & BIT(out)) -> out++
	:: else -> break
	od
}

/* insert_ready is INSERT ... ON CONFLICT (position) DO NOTHING. */
inline insert_ready(at, mine) {
	i = 0; k = 0;
	do
	:: i < tuples ->
		if
		:: ((live | inserting) & BIT(i)) && position[i] == at -> k = 1
		:: else
		fi;
		i++
	:: else -> break
	od;
	if
	:: k -> skip
	:: else ->
		assert(tuples < TUPLES);
		position[tuples] = at;
		inserting = inserting | BIT(tuples);
		mine = mine | BIT(tuples);
		tuples++
	fi;
	i = 0; k = 0
}

proctype pusher(byte id) {
	byte seen, relied, inserted;
	byte i, k;

	d_step { seen = live };                                /* the snapshot of the statement */
	d_step {
#ifdef PUSH_UNHELD
		if
		:: seen != 0 -> skip
		:: else -> insert_ready(id, inserted)
		fi
#else
		relied = seen & live & ~row_locked;                /* FOR UPDATE SKIP LOCKED */
		if
		:: relied != 0 ->
			lowest(relied, k);
			relied = BIT(k);
			row_locked = row_locked | relied;
			k = 0
		:: else -> insert_ready(id, inserted)
		fi
#endif
	};
	if
	:: d_step {                                            /* commit */
		pending = pending | BIT(id);
		live = live | inserted;
		inserting = inserting & ~inserted;
		row_locked = row_locked & ~relied;
		seen = 0; relied = 0; inserted = 0
	   }
	:: d_step {                                            /* rollback, or death of the client */
		inserting = inserting & ~inserted;
		row_locked = row_locked & ~relied;
		seen = 0; relied = 0; inserted = 0
	   }
	fi
}

/* unlock is unlockSQL: it deletes the lock record and inserts a ready row if the key has more entries. more is what its
   snapshot shows of them. */
inline unlock(more, at, inserted) {
	if
	:: more != 0 -> insert_ready(at, inserted)
	:: else
	fi
}

proctype node() {
	byte claims, seen_rows, seen_entries, seen_token;
	byte mine, chosen, deleted, inserted, my_token, work, more, last, count;
	byte i, k;
	bool locks;

again:
	atomic { mine = 0; chosen = 0; deleted = 0; inserted = 0; my_token = 0; work = 0; more = 0; last = 0; count = 0; locks = 0; claims++ };
	if
	:: claims > CLAIMS || live == 0 -> goto over           /* a node that sees no ready row waits */
	:: claims <= CLAIMS && live != 0
	fi;
	d_step { seen_rows = live; seen_entries = pending; seen_token = token };
	atomic {
		mine = seen_rows & live & ~row_locked;             /* FOR UPDATE SKIP LOCKED */
		row_locked = row_locked | mine;
		d_step {                                           /* the entries that the lock record will cover */
			i = 0;
			do
			:: i < ENTRIES ->
				if
				:: seen_entries & BIT(i) -> last = i; count++
				:: else
				fi;
				i++
			:: else -> break
			od;
			i = 0
		};
		if
		:: mine != 0 -> d_step { lowest(mine, k); chosen = BIT(k); k = 0 }
		:: seen_rows != 0 && seen_entries != 0 ->          /* ignore_row_locks */
			d_step { lowest(seen_rows, k); chosen = BIT(k); k = 0 }
		:: mine == 0 -> skip
		fi
	};
	atomic {
		if
		:: chosen == 0 || seen_token != 0 -> skip
#ifdef NO_KEY_LOCK
		:: else -> token_seq++; my_token = token_seq
#else
		:: else ->
			if
			:: key_locked -> skip
			:: else ->
				key_locked = 1; locks = 1;
				!lock_updating;                            /* ON CONFLICT DO NOTHING waits for a deleter */
				if
				:: token == 0 -> token_seq++; my_token = token_seq
				:: else
				fi
			fi
#endif
		fi;
		if :: my_token != 0 -> deleted = chosen & mine :: else fi
	};
	if
	:: d_step {                                            /* commit */
		if
		:: my_token != 0 ->
			token = my_token;
			granted = my_token;
			lowest(chosen, k);
			lock_position = position[k];
			lock_last = last; lock_count = count;
			k = 0
		:: else
		fi;
		live = live & ~deleted;
		row_locked = row_locked & ~mine;
		if :: locks -> key_locked = 0 :: else fi;
		mine = 0; chosen = 0; deleted = 0; locks = 0; seen_rows = 0; seen_entries = 0; seen_token = 0
	   }
	:: my_token != 0 -> d_step {                           /* rollback */
		my_token = 0;
		row_locked = row_locked & ~mine;
		if :: locks -> key_locked = 0 :: else fi;
		mine = 0; chosen = 0; deleted = 0; locks = 0; seen_rows = 0; seen_entries = 0; seen_token = 0
	   }
	fi;
	if
	:: my_token == 0 -> goto again
	:: else
	fi;

	d_step { first_entries(pending, last, count, work); if :: token != my_token -> work = 0 :: else fi; i = 0; k = 0 };

	/* Finish: holdSQL, doneSQL, unlockSQL in one transaction. */
	d_step { more = pending & ~work };                      /* read again below, but for ONE_LOOK */
	atomic {
#ifdef SKIPPED_LOST
		if
		:: lock_updating || lock_shared != 0 -> goto again
		:: !lock_updating && lock_shared == 0
		fi;
#else
		!lock_updating && lock_shared == 0;
#endif
		if
#ifndef NO_FENCE
		:: token != my_token -> goto again
#endif
		:: else -> lock_updating = 1
		fi
	};
#ifndef ONE_LOOK
	d_step { more = pending & ~work };                      /* unlockSQL has a snapshot of its own */
#endif
	d_step {
		if
		:: more != 0 -> lowest(more, k); unlock(more, k, inserted)
		:: else
		fi;
		i = 0; k = 0
	};
	d_step {
		assert(my_token == granted);                       /* fence */
		assert((work & ended) == 0);                        /* one outcome */
		ended = ended | work;
		pending = pending & ~work;
		live = live | inserted;
		inserting = inserting & ~inserted;
		token = 0;
		lock_updating = 0;
		my_token = 0; work = 0; more = 0; last = 0; count = 0; inserted = 0; deleted = 0
	};
	goto again;
over:
	skip
}

proctype sweeper() {
	byte sweeps, seen, dead;
	bool held;

again:
	atomic { sweeps++; seen = 0; dead = 0; held = 0 };
	if
	:: sweeps > SWEEPS -> goto over
	:: sweeps <= SWEEPS && token != 0 -> skip
	:: sweeps <= SWEEPS -> goto over
	fi;
	d_step { seen = live; held = (token != 0) };
#ifndef SWEEP_UNHELD
	d_step {                                               /* FOR KEY SHARE SKIP LOCKED */
		if
		:: held && token != 0 && !lock_updating -> lock_shared++
		:: else -> held = 0
		fi
	};
#endif
	d_step {
		if
		:: held -> dead = seen & live & ~row_locked; row_locked = row_locked | dead
		:: else
		fi
	};
	d_step {
		live = live & ~dead;
		row_locked = row_locked & ~dead;
#ifndef SWEEP_UNHELD
		if :: held -> lock_shared-- :: else fi
#endif
	};
	goto again;
over:
	skip
}

/* Recovery ends the lock of a node whose lease has lapsed; the node may have died, or go on and finish later. */
proctype recoverer() {
	byte recoveries, seen, more, inserted;
	byte i, k;

again:
	atomic { recoveries++; seen = 0; more = 0; inserted = 0 };
	if
	:: recoveries > RECOVERIES || token == 0 -> goto over
	:: recoveries <= RECOVERIES && token != 0
	fi;
	d_step { seen = token };
	d_step {                                               /* FOR UPDATE SKIP LOCKED */
		if
		:: token == seen && seen != 0 && !lock_updating && lock_shared == 0 -> lock_updating = 1
		:: else -> seen = 0
		fi
	};
	if
	:: seen == 0 -> goto again
	:: else
	fi;
	d_step { more = pending };
	d_step { unlock(more, lock_position, inserted) };
	d_step {
		live = live | inserted;
		inserting = inserting & ~inserted;
		token = 0;
		lock_updating = 0
	};
	goto again;
over:
	skip
}

init {
	atomic {
		run pusher(1);
#if PUSHERS > 1
		run pusher(2);
#endif
		run node();
		run node();
		run sweeper();
		run recoverer()
	};
	_nr_pr == 1;
	assert(token == 0 && !lock_updating && lock_shared == 0 && !key_locked && row_locked == 0 && inserting == 0);
	assert(pending == 0 || live != 0)                      /* no entry is stranded */
}
