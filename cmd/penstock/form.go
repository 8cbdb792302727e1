package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock/penstock/pkg/operator"
)

// mayBeEmpty are arguments whose empty value means entries without one.
var mayBeEmpty = []string{"FLOW", "VALUE"}

// checkForm refuses values that no command takes: texts that are not UTF-8, which the API would change, empty
// arguments, numbers and durations below zero, and numbers that are none.
func checkForm(c *cobra.Command, args []string) error {
	if strings.HasPrefix(c.Name(), cobra.ShellCompRequestCmd) {
		return nil // what is completed may be empty
	}
	for i, arg := range args {
		name := argumentName(c.Use, i)
		switch {
		case !utf8.ValidString(arg):
			return usagef("%s is %q: want UTF-8", name, arg)
		case arg == "" && !slices.Contains(mayBeEmpty, name):
			return usagef("%s is empty", name)
		}
	}
	var wrong error
	c.Flags().Visit(func(f *pflag.Flag) {
		if err := checkFlag(f); err != nil && wrong == nil {
			wrong = err
		}
	})
	return wrong
}

func checkFlag(f *pflag.Flag) error {
	value := f.Value.String()
	switch f.Value.Type() {
	case "string", "stringArray":
		if !utf8.ValidString(value) {
			return usagef("--%s is %q: want UTF-8", f.Name, value)
		}
	case "float64":
		if n, err := strconv.ParseFloat(value, 64); err != nil || math.IsNaN(n) || math.IsInf(n, 0) {
			return usagef("--%s is %q: want a number", f.Name, value)
		}
		fallthrough
	default:
		if strings.HasPrefix(value, "-") { // of a number or a duration
			return usagef("--%s is %q: want 0 or more", f.Name, value)
		}
	}
	return nil
}

// argumentName is the word for an argument in the usage of its command: ID of "wait ID...".
func argumentName(use string, i int) string {
	words := strings.Fields(use)[1:]
	if len(words) == 0 {
		return "the argument"
	}
	return strings.Trim(words[min(i, len(words)-1)], "[].")
}

// readable says in words of ours why the value of a flag cannot be read.
func readable(_ *cobra.Command, err error) error {
	var wrong *pflag.InvalidValueError
	if !errors.As(err, &wrong) {
		return err
	}
	want := wrong.Unwrap().Error()
	var number *strconv.NumError
	switch kind := wrong.GetFlag().Value.Type(); {
	case kind == "duration":
		want = "want a duration such as 500ms, 30s or 2h"
	case kind == "bool":
		want = "want true or false"
	case errors.Is(err, strconv.ErrRange):
		want = "the number is too large"
	case errors.As(err, &number):
		want = "want a number"
	}
	return fmt.Errorf("--%s is %q: %s", wrong.GetFlag().Name, wrong.GetValue(), want)
}

// pageLimit is the value of --limit.
type pageLimit struct{ n *int }

func (l pageLimit) String() string { return strconv.Itoa(*l.n) }
func (l pageLimit) Type() string   { return "int" }

// Set implements pflag.Value.
func (l pageLimit) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > operator.PageMax {
		return fmt.Errorf("want 1 to %d", operator.PageMax)
	}
	*l.n = n
	return nil
}

// limitFlag adds --limit of a list.
func limitFlag(flags *pflag.FlagSet, n *int, usual int, help string) {
	*n = usual
	flags.Var(pageLimit{n}, "limit", help)
}
