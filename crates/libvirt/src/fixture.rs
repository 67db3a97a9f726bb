//! Fixture: a domain's definition for unit tests, and ways to change it.

use roxmltree::Document;

use crate::edit::Edits;

/// As virt-install makes it, with a serial number for the disk.
pub const DOMAIN: &str = "<domain type='kvm'>
  <name>web</name>
  <uuid>7ff91744-3560-45d6-a0c5-e279a76bb8e0</uuid>
  <memory unit='KiB'>2097152</memory>
  <currentMemory unit='KiB'>2097152</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <clock offset='utc'>
    <timer name='rtc' tickpolicy='catchup'/>
  </clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='/var/lib/libvirt/images/web.qcow2'/>
      <target dev='vda' bus='virtio'/>
      <serial>root</serial>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>
    <disk type='file' device='cdrom'>
      <driver name='qemu' type='raw'/>
      <target dev='sda' bus='sata'/>
      <readonly/>
    </disk>
    <controller type='usb' index='0' model='qemu-xhci' ports='15'/>
    <interface type='network'>
      <mac address='52:54:00:12:34:56'/>
      <source network='default'/>
      <model type='virtio'/>
    </interface>
    <serial type='pty'>
      <target type='isa-serial' port='0'/>
    </serial>
    <console type='pty'>
      <target type='serial' port='0'/>
    </console>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <channel type='spicevmc'>
      <target type='virtio' name='com.redhat.spice.0'/>
    </channel>
    <input type='tablet' bus='usb'/>
    <graphics type='spice' autoport='yes'/>
    <video>
      <model type='virtio'/>
    </video>
    <watchdog model='itco' action='reset'/>
    <memballoon model='virtio'/>
    <rng model='virtio'>
      <backend model='random'>/dev/urandom</backend>
    </rng>
  </devices>
</domain>
";

/// The domain with another `<cpu>` element, or without one.
pub fn with_cpu(element: &str) -> String {
    DOMAIN.replace("<cpu mode='host-passthrough' check='none' migratable='on'/>", element)
}

/// The domain with one more device, before its network.
pub fn with_device(element: &str) -> String {
    DOMAIN.replace("    <interface", &format!("    {element}\n    <interface"))
}

/// The domain with one more setting.
pub fn with_setting(element: &str) -> String {
    DOMAIN.replace("  <vcpu", &format!("  {element}\n  <vcpu"))
}

/// The text with an element or attribute at this path, in the first elements that have the names of the path: `features/smm@state=on`.
pub fn with(xml: &str, path: &str) -> String {
    let document = Document::parse(xml).unwrap();
    let (names, attribute) = path.split_once('@').map_or((path, None), |(names, attribute)| (names, Some(attribute)));
    let attribute = attribute.map(|attribute| attribute.split_once('=').unwrap_or((attribute, "7")));
    let mut element = document.root_element();
    let mut missing = Vec::new();
    for name in names.split('/').filter(|name| !name.is_empty()) {
        match element.children().find(|child| child.tag_name().name() == name && missing.is_empty()) {
            Some(child) => element = child,
            None => missing.push(name),
        }
    }
    let mut edits = Edits::new(xml);
    let written = attribute.map_or_else(String::new, |(name, value)| format!(" {name}='{value}'"));
    if let Some((last, outer)) = missing.split_last() {
        let new = outer
            .iter()
            .rev()
            .fold(format!("<{last}{written}>7</{last}>"), |new, name| format!("<{name}>{new}</{name}>"));
        edits.add_last(element, &new);
        return edits.apply();
    }
    let name = attribute.map_or("", |(name, _)| name);
    let (old, at) = match element.attribute_node(name) {
        Some(old) => (old.range().start - 1, old.range().end),
        None => {
            let at = element.range().start + 1 + element.tag_name().name().len();
            (at, at)
        }
    };
    format!("{}{written}{}", &xml[..old], &xml[at..])
}
