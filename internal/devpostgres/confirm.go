package devpostgres

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// ConfirmOnTerminal asks the person at the terminal a question and reports whether the answer was
// yes. If standard input or standard error is no terminal it returns false without a question.
func ConfirmOnTerminal(question string) bool {
	if !term.IsTerminal(int(os.Stdin.Fd())) || !term.IsTerminal(int(os.Stderr.Fd())) {
		return false
	}
	return ask(os.Stdin, os.Stderr, question)
}

func ask(in io.Reader, out io.Writer, question string) bool {
	fmt.Fprint(out, question, " [y/N] ")
	answer, _ := bufio.NewReader(in).ReadString('\n')
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true
	}
	return false
}
