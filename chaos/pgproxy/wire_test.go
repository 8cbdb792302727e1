package pgproxy

import (
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
)

// A pass of a leader's duty that changed nothing is no commit that a fault could lose anything of.
func TestADutyThatChangedNothingAnswersZero(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "0": false, "17": true, "10": true,
		"\x00\x00\x00\x00": false, "\x00\x00\x01\x00": true, "\x00\x00\x00\x00\x00\x00\x00\x00": false,
	} {
		body, err := (&pgproto3.DataRow{Values: [][]byte{[]byte(text)}}).Encode(nil)
		if err != nil {
			t.Fatal(err)
		}
		if countRow(body[5:]) != want {
			t.Errorf("%q: %v, want %v", text, !want, want)
		}
	}
	for sql, want := range map[string]Kind{
		"SELECT penstock.expire_entries($1, $2)": Expire, "SELECT penstock.settle_cancel_requests($1, $2)": Expire,
		"SELECT penstock.step_batch($1)": Batch, "SELECT penstock.batch_status($1)": Other,
	} {
		if got := kindOf(sql); got != want {
			t.Errorf("%s is of kind %s, want %s", sql, got, want)
		}
	}
	one, none := effect{rows: 1, updated: 1}, effect{rows: 1}
	if !Promote.changes(one) || Promote.changes(none) || Expire.changes(none) || Batch.changes(none) {
		t.Error("a duty changes something where it says so, and only there")
	}
}
