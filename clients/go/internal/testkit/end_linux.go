package testkit

import (
	"os/exec"
	"syscall"
)

// endWithTest has a command end with the test, also if that is killed before it can clean up.
func endWithTest(command *exec.Cmd) {
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
