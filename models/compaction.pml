/*
 * Compaction and promotion beside claims of one lock key, each a transaction under READ COMMITTED.
 *
 * The model follows compactable and replace_merged, promoteSQL, the claim of a group with claimGroupsSQL, doneSQL and unlockSQL. Each
 * entry has a payload of one bit. A compaction merges the payloads of entries that are not handed out into the oldest of them, and
 * ends the others as done. One node claims; what several nodes do to a key is in claim.pml.
 *
 * Claims are checked:
 *   each payload runs once      the node sees each bit in one entry only, and all of them when no transaction is left
 *   no entry is stranded        a pending entry has a ready row, or its key a lock record
 *   one ready row per entry     two promotions give an entry one ready row
 *
 * Variants, each of which has to violate one of the claims:
 *   NO_KEY_LOCK     the compaction does not take the advisory lock of the key
 *   EARLY_READ      the compaction reads the lock record before it has the advisory lock
 *   PROMOTE_UNHELD  the promotion does not lock the entries that it found
 */

#define ENTRIES 4        /* 0 and 1 are pending; 2 and 3 are initial, and due when a promotion comes to them */
#define BIT(i)  (1 << (i))

byte pending = 3;
byte initial = 12;
byte payload[ENTRIES];   /* committed */
byte entry_locked = 0;   /* FOR UPDATE */
byte handed_out = 0;     /* payload bits that a node read under a lock record */
byte ready_rows = 1;     /* committed ready rows of the key; more than one is permitted */
byte promotions[ENTRIES];

byte token = 0;
byte lock_last, lock_count;
bool lock_updating = 0;
bool key_locked = 0;

inline oldest(set, n, last, out) {
	out = 0; i = 0; k = 0;
	do
	:: i < ENTRIES && i <= last && k < n ->
		if
		:: set & BIT(i) -> out = out | BIT(i); k++
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0; k = 0
}

proctype compactor() {
	byte i, k, base, merged, bits, last;
	bool got;

#ifdef EARLY_READ
	d_step { if :: token != 0 -> last = lock_last + 1 :: else -> last = 0 fi };
#endif
#ifndef NO_KEY_LOCK
	d_step { if :: !key_locked -> key_locked = 1; got = 1 :: else fi };
	if
	:: !got -> goto over
	:: else
	fi;
#endif
	/* The run of entries that are not handed out, in a snapshot that is younger than the advisory lock. */
	d_step {
#ifndef EARLY_READ
		if :: token != 0 -> last = lock_last + 1 :: else -> last = 0 fi;
#endif
		i = last;
		do
		:: i < ENTRIES ->
			if :: pending & BIT(i) -> merged = merged | BIT(i) :: else fi;
			i++
		:: else -> break
		od;
		i = 0
	};
	/* FOR UPDATE NOWAIT, and whether all of them are still claimable. */
	d_step {
		if
		:: (merged & entry_locked) == 0 && (merged & pending) == merged -> entry_locked = entry_locked | merged
		:: else -> merged = 0
		fi
	};
	/* The update of the oldest, the end of the others, commit. */
	d_step {
		i = 0; base = ENTRIES;
		do
		:: i < ENTRIES ->
			if
			:: merged & BIT(i) ->
				bits = bits | payload[i];
				if :: base == ENTRIES -> base = i :: else fi
			:: else
			fi;
			i++
		:: else -> break
		od;
		if
		:: base < ENTRIES -> payload[base] = bits; pending = pending & ~(merged & ~BIT(base))
		:: else
		fi;
		entry_locked = entry_locked & ~merged;
#ifndef NO_KEY_LOCK
		key_locked = 0;
#endif
		i = 0; merged = 0; base = 0; bits = 0
	};
over:
	skip
}

proctype promoter() {
	byte i, due, rounds;

	do
	:: rounds == 2 || initial == 0 -> break
	:: rounds < 2 && initial != 0 ->
		d_step { rounds++; due = initial };
#ifndef PROMOTE_UNHELD
		d_step { due = due & initial & ~entry_locked; entry_locked = entry_locked | due };    /* SKIP LOCKED, rows as they are now */
#endif
		if
		:: d_step {                                        /* commit: new positions, one ready row for the key */
			i = 0;
			do
			:: i < ENTRIES ->
				if :: due & BIT(i) -> promotions[i]++; assert(promotions[i] == 1) :: else fi;
				i++
			:: else -> break
			od;
			i = 0;
			initial = initial & ~due;
			pending = pending | due;
			if :: due != 0 -> ready_rows++ :: else fi;
			entry_locked = entry_locked & ~due
		   }
		:: d_step { entry_locked = entry_locked & ~due }   /* rollback */
		fi
	od
}

proctype node() {
	byte i, k, seen, count, last, run_set, bits, rows;
	byte claims;
	bool got;

end:                                                       /* the node may wait for a promotion for ever */
	do
	:: ready_rows > 0 && claims < 5 ->
		d_step { claims++; seen = pending; rows = ready_rows; got = 0; count = 0; last = 0 };
		d_step { if :: !key_locked -> key_locked = 1; got = 1 :: else fi };
		if
		:: got && rows > 0 ->
			d_step {                                       /* commit of the claim: it deletes one ready row */
				i = 0;
				do
				:: i < ENTRIES ->
					if :: seen & BIT(i) -> count++; last = i :: else fi;
					i++
				:: else -> break
				od;
				i = 0;
				token = 1; lock_last = last; lock_count = count;
				ready_rows--;
				key_locked = 0
			};
			d_step {                                       /* claimGroupsSQL */
				oldest(pending, count, last, run_set);
				i = 0;
				do
				:: i < ENTRIES ->
					if :: run_set & BIT(i) -> bits = bits | payload[i] :: else fi;
					i++
				:: else -> break
				od;
				i = 0;
				assert((handed_out & bits) == 0);          /* each payload runs once */
				handed_out = handed_out | bits;
				bits = 0
			};
			/* Finish: each entry ends if it is there; the second statement sees the rest. */
			d_step { lock_updating = 1 };
			atomic {
				(entry_locked & run_set) == 0;             /* the delete waits for whoever locked an entry */
				d_step {
					assert((pending & run_set) == run_set);
					pending = pending & ~run_set;
					if :: pending != 0 -> ready_rows++ :: else fi;
					token = 0; lock_updating = 0;
					run_set = 0; seen = 0; count = 0; last = 0; rows = 0
				}
			}
		:: got && rows == 0 -> key_locked = 0
		:: else
		fi
	:: claims == 5 -> break
	:: ready_rows == 0 && initial == 0 -> break
	od
}

init {
	byte i;
	atomic {
		for (i : 0 .. ENTRIES - 1) { payload[i] = BIT(i) };
		run compactor();
		run compactor();
		run promoter();
		run promoter();
		run node()
	};
	timeout;                                               /* each process has ended, or the node waits for a promotion */
	assert(pending == 0 || ready_rows > 0 || token != 0);
	assert(pending != 0 || initial != 0 || handed_out == 15)
}
